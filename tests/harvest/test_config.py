"""The section `harvest`: errors name the setting and the line, the example is valid, and no secret is shown."""

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.harvest.config import HarvestSection, NivodaSourceSection
from penstock.settings import Settings
from tests.kernel.config.test_loader import Config
from tests.support.processes import penstock
from tests.support.settings import write_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "diamonds" / "penstock.yaml"
SOURCE = "source: {kind: rest, url: 'http://source.test'}"
NIVODA = "kind: nivoda, url: 'http://source.test', username: ann, password: env:PASSWORD"
FEED = "harvest.feeds.stones"


def feed(text: str, source: str = SOURCE) -> str:
    """Return a configuration with one feed, whose fifth line is *text*."""
    fields = "fields: {shape: {path: a.shape}}"
    return f"harvest:\n  feeds:\n    stones: {{{source}, key: id,\n      {fields},\n      {text}}}\n"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(tmp_path / "penstock.yaml")


def test_example_is_valid(config: Config) -> None:
    """H13: the shipped example is the feed of the founding document."""
    section = config.load(EXAMPLE.read_text()).harvest.feeds["diamonds"]
    assert isinstance(section.source, NivodaSourceSection)
    assert (section.page_size, section.partitions.count, section.overlap) == (30, 30, timedelta(minutes=1))
    assert [rule.name for rule in section.pricing.rules][-1] == "all others"


def test_defaults_are_those_of_the_founding_document(config: Config) -> None:
    """H4, H7: pages of 30, batches of 2000, 5 concurrent upserts of 100."""
    section = config.load(feed("page_size: 30")).harvest.feeds["stones"]
    batches = section.consolidation
    assert (section.page_size, batches.batch_size, batches.upsert_size, batches.upsert_concurrency) == (
        30,
        2_000,
        100,
        5,
    )
    assert HarvestSection() == Settings().harvest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_size: 0", f"FILE:5:7: {FEED}.page_size: must be a whole number of at least 1"),
        ("pagesize: 5", f"FILE:5:7: {FEED}.pagesize: unknown key; did you mean 'page_size'?"),
        ("key: id2", "FILE:5:7: not valid YAML: found duplicate key"),
        ("updated_at: a..b", f"FILE:5:7: {FEED}.updated_at: must match"),
        ("updated_at: ''", f"FILE:5:7: {FEED}.updated_at: must match"),
        ("updated_at: 'a b'", f"FILE:5:7: {FEED}.updated_at: must match"),
        ("updated_at: a.b.c.d.e.f.g.h.i.j.k", f"FILE:5:7: {FEED}.updated_at: must match"),
        ("overlap: -1", f"FILE:5:7: {FEED}.overlap: "),
        ("overlap: soon", f"FILE:5:7: {FEED}.overlap: "),
        ("every: 0", f"FILE:5:7: {FEED}.every: must be a duration greater than 0 seconds"),
        ("every: -PT1H", f"FILE:5:7: {FEED}.every: must be a duration of at least 0 seconds"),
        ("pages_per_turn: 0", f"FILE:5:7: {FEED}.pages_per_turn: must be a whole number of at least 1"),
        ("limits: {max_delete_ratio: 2}", f"FILE:5:16: {FEED}.limits.max_delete_ratio: must be a number of at most 1"),
        (
            "limits: {max_reject_ratio: -1}",
            f"FILE:5:16: {FEED}.limits.max_reject_ratio: must be a number of at least 0",
        ),
        (
            "limits: {rejects_allowed: -1}",
            f"FILE:5:16: {FEED}.limits.rejects_allowed: must be a whole number of at least 0",
        ),
        ("partitions: {lowest: 5, highest: 5}", f"FILE:5:7: {FEED}.partitions: lowest must be less than highest"),
        ("partitions: {count: 0}", f"FILE:5:20: {FEED}.partitions.count: must be a whole number of at least 1"),
        ("consolidation: {mode: fast}", f"FILE:5:23: {FEED}.consolidation.mode: must be one of: sets, batches"),
        ("cost: {path: price, decimals: 7}", f"FILE:5:27: {FEED}.cost.decimals: must be a whole number of at most 6"),
        ("cost: {}", f"FILE:5:7: {FEED}.cost.path: is required"),
        (
            "pricing: {rules: [{name: x}]}",
            f"FILE:3:5: {FEED}: pricing.rules need a cost: set cost.path to the path of the cost in a record",
        ),
        (
            "cost: {path: p}, pricing: {rules: [{name: x, when: {color: {any_of: [D]}}}]}",
            f"FILE:3:5: {FEED}: pricing rule 'x' uses the field color, which is not in `fields`",
        ),
        (
            "cost: {path: p}, pricing: {rules: [{name: x}, {name: x}]}",
            f"FILE:5:34: {FEED}.pricing.rules: each rule needs a different name",
        ),
        (
            "cost: {path: p}, pricing: {rules: [{name: x, when: {shape: {}}}]}",
            f"FILE:5:59: {FEED}.pricing.rules.0.when.shape: set any_of, or set from, below or both",
        ),
        (
            "cost: {path: p}, pricing: {rules: [{name: x, when: {shape: {any_of: [A], from: 1}}}]}",
            f"FILE:5:59: {FEED}.pricing.rules.0.when.shape: set any_of, or set from, below or both",
        ),
        (
            "cost: {path: p}, pricing: {rules: [{name: x, markup_percent: -101}]}",
            f"FILE:5:52: {FEED}.pricing.rules.0.markup_percent: must be a number of at least -100",
        ),
        (
            "cost: {path: p}, pricing: {rules: [{name: x, markup: 1}]}",
            f"FILE:5:52: {FEED}.pricing.rules.0.markup: unknown key; did you mean 'markup_percent'?",
        ),
    ],
)
def test_errors_in_a_feed(config: Config, text: str, message: str) -> None:
    """H13: an error has the line, the column, the setting and the problem."""
    assert config.refused(feed(text)).startswith(message)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("kind: soap, url: 'http://x.test'", "source: its key kind must be one of: nivoda, rest"),
        ("url: 'http://x.test'", "source: needs the key kind"),
        ("kind: rest", "source.url: is required"),
        ("kind: rest, url: 'http://ann:hunter2@x.test'", "source.url: "),
        ("kind: nivoda, url: 'http://x.test', username: ann", "source.password: is required"),
        (
            "kind: nivoda, url: 'http://x.test', username: ann, password: hunter2",
            "source.password: must be a reference to a secret",
        ),
        ("kind: rest, url: 'http://x.test', headers: {Authorization: hunter2}", "source.headers: "),
        ("kind: rest, url: 'http://x.test', headers: {X-API-Key: hunter2}", "source.headers: "),
        ("kind: rest, url: 'http://x.test', params: {token: hunter2}", "source.params: "),
        (
            "kind: rest, url: 'http://x.test', secret_headers: {Authorization: hunter2}",
            "source.secret_headers.Authorization: must be a reference to a secret",
        ),
        (
            "kind: rest, url: 'http://x.test', total: null",
            "source.rest: set `total` to the path of the total number of records, or set `count_path`",
        ),
        (
            "kind: rest, url: 'http://x.test', after_param: null",
            "source.rest: after_param and upto_param must both be set, or both be null",
        ),
        ("kind: rest, url: 'http://x.test', records: 'a..b'", "source.records: must match"),
        ("kind: rest, url: 'http://x.test', paging: scroll", "source.paging: must be one of: offset, page"),
        (
            "kind: rest, url: 'http://x.test', call: {timeout: 0}",
            "source.call.timeout: must be a duration greater than 0 seconds",
        ),
        ("kind: rest, url: 'http://x.test', call: {rate: 0}", "source.call.rate: must be a number greater than 0"),
    ],
)
def test_errors_in_a_source(config: Config, source: str, message: str) -> None:
    """H14: a source with missing or invalid settings, or with a secret in the file, which the error does not show."""
    error = config.refused(feed("page_size: 30", source=f"source: {{{source}}}"))
    assert error.startswith("FILE:3:"), error
    assert f"{FEED}.{message}" in error
    assert "hunter2" not in error


def test_page_size_of_nivoda_is_limited(config: Config) -> None:
    """H14: Nivoda allows at most 50 records per page."""
    assert config.load(feed("page_size: 50", source=f"source: {{{NIVODA}}}")).harvest.feeds["stones"].page_size == 50
    error = config.refused(feed("page_size: 51", source=f"source: {{{NIVODA}}}"))
    assert error == f"FILE:3:5: {FEED}: page_size must be at most 50 for the source kind nivoda"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("harvest: {workers: 0}", "FILE:1:11: harvest.workers: must be a whole number of at least 1"),
        ("harvest: {lease: 0}", "FILE:1:11: harvest.lease: must be a duration"),
        ("harvest: {stalled_after: -1}", "FILE:1:11: harvest.stalled_after: must be a duration"),
        ("harvest: {retention: -P1D}", "FILE:1:11: harvest.retention: must be a duration"),
        ("harvest: {feeds: {'no name': {}}}", "FILE:1:19: harvest.feeds.no name"),
        (
            "harvest: {alerts: {email: {host: h, sender: invalid, to: [a@b.test]}}}",
            "FILE:1:37: harvest.alerts.email.sender: must match",
        ),
        (
            "harvest: {alerts: {email: {host: h, sender: a@b.test, to: []}}}",
            "FILE:1:55: harvest.alerts.email.to: must not be empty",
        ),
        (
            "harvest: {alerts: {email: {host: h, sender: a@b.test, to: [a@b.test], password: hunter2}}}",
            "FILE:1:71: harvest.alerts.email.password: must be a reference to a secret",
        ),
        (
            "harvest: {alerts: {webhooks: [{url: 'http://x.test', secret_headers: {X: hunter2}}]}}",
            "FILE:1:71: harvest.alerts.webhooks.0.secret_headers.X: must be a reference to a secret",
        ),
        ("harvest: {alerts: {webhooks: [{}]}}", "FILE:1:31: harvest.alerts.webhooks.0.url: is required"),
    ],
)
def test_errors_in_the_section(config: Config, content: str, message: str) -> None:
    """H12: invalid workers, times and alert channels; a secret in the file is not shown."""
    error = config.refused(content)
    assert error.startswith(message)
    assert "hunter2" not in error


def test_config_show_has_no_secrets(tmp_path: Path) -> None:
    """H12: `penstock config show` prints the references of secrets, never their values."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    mail = {"host": "h", "sender": "a@b.test", "to": ["a@b.test"], "username": "u", "password": f"file:{secret}"}
    hook = {"url": "http://x.test", "secret_headers": {"Authorization": "env:HOOK_TOKEN"}}
    source = {"kind": "nivoda", "url": "http://x.test", "username": "u", "password": "env:HOOK_TOKEN"}
    section = {"feeds": {"stones": {"source": source, "key": "id"}}, "alerts": {"email": mail, "webhooks": [hook]}}
    write_config(tmp_path, {"harvest": section})
    for options in ((), ("--json",)):
        done = penstock("config", "show", *options, cwd=tmp_path, env={"HOOK_TOKEN": "hunter2"})
        assert done.code == 0, done.err
        assert "hunter2" not in done.out + done.err
        assert "env:HOOK_TOKEN" in done.out
        assert f"file:{secret}" in done.out


def test_config_validate_reports_the_error(tmp_path: Path) -> None:
    """H13: exit code 3 with the error, and without a traceback."""
    (tmp_path / "penstock.yaml").write_text(feed("pricing: {rules: [{name: x}]}"))
    done = penstock("config", "validate", cwd=tmp_path)
    assert (done.code, "Traceback" in done.err) == (3, False)
    assert "pricing.rules need a cost" in done.err
