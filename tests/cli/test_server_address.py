"""Where commands find the server, and what they say when none answers."""

from pathlib import Path

import pytest

from penstock.cli.server_address import API, QUERY_API, find_server, normalize_url, select_config_file
from penstock.kernel.errors import Invalid


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("PENSTOCK_URL", "PENSTOCK_QUERY_URL", "PENSTOCK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    select_config_file(None)
    return tmp_path


def test_the_option_comes_first_then_the_environment_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLI: the server is `--url`, else PENSTOCK_URL, else `server` of penstock.yaml, else 127.0.0.1:8080."""
    assert find_server(None).url == "http://127.0.0.1:8080"
    assert find_server(None, QUERY_API).url == "http://127.0.0.1:8081"
    (tmp_path / "penstock.yaml").write_text("server: {host: 0.0.0.0, port: 9000, query_port: 9001}\nflows: {x: 1}\n")
    assert (find_server(None).url, find_server(None).origin) == (
        "http://127.0.0.1:9000",
        "server.port in penstock.yaml",
    )
    assert find_server(None, QUERY_API).url == "http://127.0.0.1:9001"
    monkeypatch.setenv("PENSTOCK__SERVER__PORT", "9002")
    assert find_server(None).url == "http://127.0.0.1:9002"
    monkeypatch.setenv("PENSTOCK_URL", "http://there:1")
    assert (find_server(None).url, find_server(None).origin) == ("http://there:1", "PENSTOCK_URL")
    assert (find_server("http://here:2").url, find_server("http://here:2").origin) == ("http://here:2", "--url")


def test_a_configuration_file_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLI: `--config` comes before PENSTOCK_CONFIG; port 0 says nothing about the address."""
    for name, port in (("one", 9100), ("two", 9200), ("zero", 0)):
        (tmp_path / f"{name}.yaml").write_text(f"server: {{host: '::', port: {port}}}\n")
    monkeypatch.setenv("PENSTOCK_CONFIG", "one.yaml")
    assert find_server(None).url == "http://127.0.0.1:9100"
    select_config_file("two.yaml")
    assert find_server(None).url == "http://127.0.0.1:9200"
    select_config_file("zero.yaml")
    assert find_server(None).url == "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:38080", "http://127.0.0.1:38080"),
        ("penstock.internal", "http://penstock.internal"),
        ("https://penstock.internal/", "https://penstock.internal"),
        ("[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_a_url_without_a_scheme_is_understood(text: str, url: str) -> None:
    """CLI: `--url host:port` and `--url host` mean http://."""
    assert normalize_url(text, "--url") == url


@pytest.mark.parametrize("text", ["ftp://x", "http://", "http://x:port", "http://x:0"])
def test_a_url_that_cannot_work_is_refused(text: str) -> None:
    """CLI: a bad address is refused before any request, with the option that has it."""
    with pytest.raises(Invalid, match=r"--url: .* is not a server address"):
        normalize_url(text, "--url")


def test_a_hint_names_the_origin_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLI: the hint for a server that does not answer names the option or variable that changes the address."""
    assert "correct --url" in find_server("x:1").make_down_hint()
    assert "the default; `penstock up` starts a server, --url URL or PENSTOCK_URL" in find_server(None).make_down_hint()
    assert "--query-url URL or PENSTOCK_QUERY_URL" in find_server(None, QUERY_API).make_down_hint()
    monkeypatch.setenv("PENSTOCK_URL", "x:1")
    assert "comes from PENSTOCK_URL" in find_server(None, API).make_down_hint()
