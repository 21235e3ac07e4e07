"""SQL templates, executed by PostgreSQL: values are bound, and the rest of the statement is unchanged."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.kernel.db.database import Database
from penstock.refdata.sql_template import TYPES, SqlTemplate, parse
from tests.support.soak import examples

OCCURRED = datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC)
VALUES: dict[str, Any] = {
    "tenantId": "acme",
    "key": "42",
    "payload": {"name": "Ann", "tags": ["a", "b"], "at": {"city": "Oslo"}},
    "snapshotJson": [{"id": 1}, {"id": 2}],
    "eventEpoch": 1_772_368_215_250,
    "eventVersion": 7,
    "eventId": UUID("0198c0de-0000-7000-8000-000000000001"),
    "occurredAt": OCCURRED,
}
ALL = ", ".join(f":{name}" for name in TYPES)


async def require_syntax(db: Database, expression: str) -> None:
    """Skip an expression that the server does not know: json_object('k': v) came with PostgreSQL 16."""
    if "json_object" in expression and int(await db.fetchval("SHOW server_version_num")) < 160_000:
        pytest.skip("PostgreSQL 15 has no json_object('k': v)")


async def run(db: Database, template: SqlTemplate, **changed: Any) -> tuple[Any, ...]:
    row = await db.fetchrow(template.sql, *template.bind(VALUES | changed))
    assert row is not None
    return tuple(row.values())


# Each contains text that looks like a parameter, a comment, a quote or a semicolon, but is not.
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("':key'", ":key"),
        ("'it''s :key'", "it's :key"),
        ("''", ""),
        ("''''", "'"),
        ("'--' || ':key' || '/*'", "--:key/*"),
        ("'a; b'", "a; b"),
        ("'a :key'\n  ' and :payload'", "a :key and :payload"),
        ("'$1 $$ $a$'", "$1 $$ $a$"),
        (r"'\'", "\\"),
        (r"'\' || ':key\'", "\\:key\\"),
        (r"'\'':key'", r"\':key"),
        (r"E'\':key'", "':key"),
        (r"e'\\'", "\\"),
        (r"E'it''s \' :key'", "it's ' :key"),
        (r"E'\\\':key'", r"\':key"),
        ("E'a\\\nb'", "a\nb"),
        ("E'a'\n'\\':key'", "a':key"),
        ("E'a' -- it's\n -- one string\n\t'\\':key'", "a':key"),
        (r"U&'\0061:key'", "a:key"),
        (r"u&'!0061\:key' UESCAPE '!'", r"a\:key"),
        ("N':key'", ":key"),
        ("B'101'::text", "101"),
        ("x'1F'::int", 31),
        ("$$:key ' \" -- /* ;$$", ":key ' \" -- /* ;"),
        ("$$$$", ""),
        ("$a$ $$:key$$ $b$ $A$ $a$", " $$:key$$ $b$ $A$ "),
        ("$a$ $b$a$", " $b"),
        ("$größe_1$:key$größe_1$", ":key"),
        ("1 AS a$b, ':key' AS c$$", 1),
        ("(SELECT a$b$ || ':key' FROM (SELECT 'x' AS a$b$) AS b$)", "x:key"),
        ('(SELECT ":key" FROM (SELECT 5 AS ":key") AS "it\'s -- :payload")', 5),
        ('(SELECT "a"":key" FROM (SELECT 5 AS "a"":key") AS q)', 5),
        (r'(SELECT U&"\0061:key" FROM (SELECT 5 AS "a:key") AS q)', 5),
        ('(SELECT "\\" FROM (SELECT 5 AS "\\") AS ":key")', 5),
        ("5 -- :key it's \"open $$ /*", 5),
        ("5 --:key\r+1", 6),
        ("5 --", 5),
        ("5 /* :key it's \"open $$ -- */ + 1", 6),
        ("5 /* a /* b :key */ :key ; /**/ */ + 1", 6),
        ("5 /*/ :key /*/ */ :key **/ + 1", 6),
        ("2 */* :key */ 3", 6),
        ("5 +-- :key\n1", 6),
        ("'5'::int", 5),
        ("'5' ::int::text::\tint", 5),
        ("make_interval(secs:=5)::text", "00:00:05"),
        ("('{1,2,3}'::int[])[1:2]", [1, 2]),
        ("('{1,2,3}'::int[])[:2]", [1, 2]),
        ("('{1,2,3}'::int[])[2:]", [2, 3]),
        ("(SELECT a[lo: hi] FROM (SELECT '{1,2,3}'::int[] AS a, 1 AS lo, 2 AS hi) AS q)", [1, 2]),
        ("(SELECT a[lo:\"hi\"] FROM (SELECT '{1,2,3}'::int[] AS a, 1 AS lo, 2 AS hi) AS q)", [1, 2]),
        ("(SELECT json_object('k': x) ->> 'k' FROM (SELECT 'v' AS x) AS q)", "v"),
        ("'{\"name\": 1}'::jsonb ? ':key'", False),
        ("'naïve\u00a0:key'", "naïve\u00a0:key"),
        ("(SELECT é\u00a0ü FROM (SELECT 5 AS é\u00a0ü) AS q)", 5),
    ],
)
async def test_other_text_is_unchanged(db: Database, expression: str, value: object) -> None:
    """R3: strings, comments, identifiers, casts and slices are unchanged, and the parameters after them are bound."""
    await require_syntax(db, expression)
    template = parse(f"SELECT {expression}\n, :tenantId, :key")
    assert template.names == ("tenantId", "key")
    assert template.sql == f"SELECT {expression}\n, ($1::text), ($2::text)"
    answer = await run(db, template)
    assert (answer[0], *answer[-2:]) == (value, "acme", "42")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (":payload->>'name'", "Ann"),
        ("cast(:payload->>'name' as text)", "Ann"),
        ("CAST(:payload AS text)::jsonb->'tags'->>1", "b"),
        (":payload->'tags'->-1", "b"),
        (":payload#>>'{at,city}'", "Oslo"),
        (":payload?'name'", True),
        (":payload ?| array['x','name']", True),
        (":payload?&array['x','name']", False),
        ('\'{"name": "Ann"}\'<@:payload', True),
        (':payload@>\'{"name": "Bob"}\'', False),
        (":payload @? '$.tags[*] ? (@ == \"a\")'", True),
        (":payload@@'$.name == \"Ann\"'", True),
        (":payload-'at'-'tags'", {"name": "Ann"}),
        (":payload['at']['city']", "Oslo"),
        ("(:payload||'{\"name\": 1}')->'name'", 1),
        ("(:payload - 'at' - 'tags')::text", '{"name": "Ann"}'),
        (":snapshotJson::text", '[{"id": 1}, {"id": 2}]'),
        ("(SELECT sum(id) FROM jsonb_to_recordset(:snapshotJson) AS row(id int))", 3),
        (":key::int", 42),
        (":key::int+:eventVersion", 49),
        ("-:eventVersion", -7),
        (":eventVersion--:key\n-1", 6),
        (":key/*:payload*/||:key", "4242"),
        (":key --:payload\r||:tenantId", "42acme"),
        ("concat(:key,:tenantId,':key')", "42acme:key"),
        ("make_interval(secs:=:eventVersion)::text", "00:00:07"),
        ("(array[1,2,3])[1: :key::int]", [1, 2, 3]),
        ("json_object('k' : :key)->>'k'", "42"),
        (":eventId", VALUES["eventId"]),
        (":occurredAt", OCCURRED),
        ("to_timestamp(:eventEpoch / 1000.0) = :occurredAt", True),
        ("CASE WHEN :key='42'THEN:key END", "42"),
    ],
)
async def test_parameters_are_bound_by_their_type(db: Database, expression: str, value: object) -> None:
    """R3: a parameter can be used like a column of its type: JSON operators, casts and arithmetic work on it."""
    await require_syntax(db, expression)
    assert (await run(db, parse(f"SELECT {expression}, :tenantId")))[0] == value


async def test_each_parameter_has_its_type(db: Database) -> None:
    """R3: every parameter is bound with its declared type, `:payload` as jsonb, even without a context."""
    template = parse("SELECT " + ", ".join(f"pg_typeof(:{name})::text AS {name}" for name in TYPES))
    assert template.names == tuple(TYPES)
    answer = await run(db, template)
    assert [word.replace("timestamp with time zone", "timestamptz") for word in answer] == list(TYPES.values())


@pytest.mark.parametrize("payload", ["a string", "42", 42, True, [], {}, [None], {"a": {"b": []}}])
async def test_any_json_is_a_payload(db: Database, payload: object) -> None:
    """R3: a jsonb value is returned unchanged; a string is a JSON string and not parsed."""
    assert await run(db, parse("SELECT :payload, :tenantId"), payload=payload) == (payload, "acme")


def test_a_name_used_twice_is_bound_once() -> None:
    """R3: parameters are numbered by first use, and `bind` returns exactly their values in that order."""
    template = parse("SELECT :key, :tenantId, :payload, :key, :tenantId")
    assert template.sql == "SELECT ($1::text), ($2::text), ($3::jsonb), ($1::text), ($2::text)"
    assert template.names == ("key", "tenantId", "payload")
    assert template.bind(VALUES) == ("42", "acme", VALUES["payload"])


def test_a_missing_value_is_an_error() -> None:
    """R3: a statement is not executed without the value of a parameter."""
    with pytest.raises(KeyError, match="key"):
        parse("SELECT :tenantId, :key").bind({"tenantId": "acme"})


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("SELECT :tenantId;", "SELECT ($1::text)"),
        (" \n SELECT :tenantId ; \n", "SELECT ($1::text)"),
        ("SELECT :tenantId; -- done; :key", "SELECT ($1::text)  -- done; :key"),
        ("SELECT :tenantId;/* a; /* b; */ */", "SELECT ($1::text) /* a; /* b; */ */"),
    ],
)
async def test_one_semicolon_at_the_end_is_dropped(db: Database, text: str, sql: str) -> None:
    """R3: a statement may end with a semicolon and be followed by comments."""
    assert parse(text).sql == sql
    assert await run(db, parse(text)) == ("acme",)


NASTY = [
    "'",
    "''",
    "'; DROP TABLE item; --",
    "acme'); DELETE FROM item; --",
    "' OR '1'='1",
    '"',
    "$1",
    "$2::text",
    "($1::text)",
    ":key",
    ":tenantId",
    "::int",
    "$$; DROP TABLE item; $$",
    "\\",
    "\\'; DROP TABLE item; --",
    "E'\\''",
    "/* ",
    "-- ",
    "%s %(key)s {key} {0}",
    "\n\r\t\x01\x7f",
    "ʼ＇’ \u2028 \ufeff \u202e \U0001f600 日本",
    "",
]


@pytest.mark.parametrize("nasty", NASTY)
async def test_a_value_is_never_read_as_sql(db: Database, nasty: str) -> None:
    """R3: tenant, key and payload are stored unchanged, and no other row is affected."""
    await db.execute("CREATE TABLE item (tenant text, key text, payload jsonb, note text)")
    await db.execute("INSERT INTO item VALUES ('acme', '42', '{}', 'mine')")
    insert = parse("INSERT INTO item VALUES (:tenantId, :key, :payload, 'of :key''s') RETURNING payload->>'v', key")
    payload = {"v": nasty, nasty: nasty}
    values = {"tenantId": nasty, "key": nasty, "payload": payload}
    assert await run(db, insert, **values) == (nasty, nasty)
    expected = [("acme", "42", {}, "mine"), (nasty, nasty, payload, "of :key's")]
    assert [tuple(row.values()) for row in await db.fetch("SELECT * FROM item ORDER BY note")] == expected

    delete = parse("DELETE FROM item WHERE tenant = :tenantId AND key=:key AND payload=:payload RETURNING note;")
    assert await run(db, delete, **values) == ("of :key's",)
    assert await db.fetchval("SELECT array_agg(note) FROM item") == ["mine"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the template is empty"),
        (" \t\n", "the template is empty"),
        (" ; ", "the template is empty"),
        ("-- :tenantId", "the template is empty"),
        ("/* :tenantId */;", "the template is empty"),
        ("SELECT :tenantId\0", "contains a NUL"),
        ("SELECT 1", "does not use :tenantId"),
        ("SELECT ':tenantId', :key", "does not use :tenantId"),
        ("SELECT E'\\':tenantId'", "does not use :tenantId"),
        ('SELECT 1 AS ":tenantId"', "does not use :tenantId"),
        ("SELECT $$:tenantId$$", "does not use :tenantId"),
        ("SELECT 1 -- :tenantId", "does not use :tenantId"),
        ("SELECT 1 /* /* */ :tenantId */", "does not use :tenantId"),
        ("SELECT 1::tenantId", "does not use :tenantId"),
        ("SELECT 1: tenantId", "does not use :tenantId"),
        ("SELECT :tenantId; SELECT 2", "line 1: there is text after the semicolon"),
        ("SELECT :tenantId;;", "line 1: there is text after the semicolon"),
        ("SELECT :tenantId;\u00a0", "line 1: there is text after the semicolon"),
        ("SELECT 1;\n-- then\nSELECT :tenantId", "line 3: there is text after the semicolon"),
        ("SELECT :tenantId; 'x'", "line 1: there is text after the semicolon"),
        ("SELECT :tenantId, $1", r"line 1: \$1 is not supported; use a named parameter: :tenantId, :key, "),
        ("SELECT :tenantId, 1+$23", r"\$23 is not supported"),
        ("SELECT :tenantId, 'a", "line 1: the string that starts here with ' is not closed"),
        ("SELECT :tenantId, 'a''", "the string that starts here with ' is not closed"),
        ("SELECT\n'a\nb',\nE'a\\', :tenantId", "line 4: the string that starts here with E' is not closed"),
        ("SELECT E'a''\\', :tenantId", "the string that starts here with E' is not closed"),
        ("SELECT E'a'\n'\\', :tenantId", "the string that starts here with E' is not closed"),
        ("SELECT E'a' --'\n--'\n'\\', :tenantId", "the string that starts here with E' is not closed"),
        ("SELECT U&'a, :tenantId", "the string that starts here with ' is not closed"),
        ('SELECT :tenantId AS "a', 'the quoted identifier that starts here with " is not closed'),
        ('SELECT :tenantId AS "a""', 'the quoted identifier that starts here with " is not closed'),
        ("SELECT $$a$, :tenantId", r"the dollar-quoted string that starts here with \$\$ is not closed"),
        ("SELECT $a$ $A$ $$, :tenantId", r"the dollar-quoted string that starts here with \$a\$ is not closed"),
        ("SELECT :tenantId /* a", r"line 1: the comment that starts here with /\* is not closed"),
        ("SELECT\n:tenantId /* /* */", r"line 2: the comment that starts here with /\* is not closed"),
        ("SELECT :tenantId /*/", r"the comment that starts here with /\* is not closed"),
        (
            "SELECT\n:tenatId",
            f"line 2: there is no parameter :tenatId, did you mean :tenantId[?] The parameters are {ALL}[.]",
        ),
        ("SELECT :tenant_id", "no parameter :tenant_id, did you mean :tenantId[?]"),
        ("SELECT :PAYLOAD, :tenantId", "no parameter :PAYLOAD, did you mean :payload[?]"),
        ("SELECT :keyE'a', :tenantId", "no parameter :keyE, did you mean :key[?]"),
        ("SELECT :key$1, :tenantId", r"no parameter :key\$1, did you mean :key[?]"),
        ("SELECT :key\u00a0, :tenantId", "no parameter :key\u00a0, did you mean :key[?]"),
        ("SELECT :zzz, :tenantId", f"no parameter :zzz[.] The parameters are {ALL}[.]"),
        ("SELECT a[lo:hi], :tenantId", r"no parameter :hi[.].* a slice a\[lo: hi\], put a space after it"),
        ("SELECT json_object('k':x), :tenantId", "no parameter :x[.].*put a space after it"),
    ],
)
def test_an_invalid_template_is_refused(text: str, sentence: str) -> None:
    """R3: an error is raised with its line when the template is parsed, not when it is executed."""
    with pytest.raises(ValueError, match=sentence):
        parse(text)


def test_a_parameter_without_a_value_is_refused() -> None:
    """R3: a parameter of other statements has another error than an unknown one."""
    allowed = ("key", "tenantId")
    assert parse("SELECT :tenantId, :key", allowed).names == ("tenantId", "key")
    with pytest.raises(ValueError, match=r"line 1: :payload has no value in .*; use one of :tenantId, :key$"):
        parse("SELECT :tenantId, :payload", allowed)
    with pytest.raises(ValueError, match=r"no parameter :paylod[.] The parameters are :tenantId, :key[.]"):
        parse("SELECT :tenantId, :paylod", allowed)


@pytest.mark.parametrize(
    "unit", ["E'a'\n", "E'\\'", "E'", "'", '"', "$a", "$$", "/*", "*/", "--", "-- \n", " ", ":", ":=", "a$", "\\", "("]
)
def test_parsing_takes_linear_time(unit: str) -> None:
    """R3: the time of parsing is proportional to the text, also for repeated and unclosed constructs."""
    for text in (f"SELECT :tenantId {unit * 50_000}", f"SELECT :tenantId, E'a{unit * 50_000}"):
        try:
            assert parse(text).names == ("tenantId",)
        except ValueError as refusal:
            assert "not closed" in str(refusal)  # noqa: PT017


@dataclass(frozen=True)
class Fragment:
    """Return an expression in pieces, where `:name` is a parameter, and its value in PostgreSQL."""

    pieces: tuple[str, ...]
    value: object


BODIES = st.lists(
    st.sampled_from(
        [
            ":key",
            ":unknown",
            ":",
            "'",
            '"',
            "\\",
            "\\'",
            "$",
            "$$",
            "$q$",
            "$1",
            "--",
            "/*",
            "*/",
            ";",
            "\n",
            "E'",
            "é",
            " ",
        ]
    ),
    max_size=7,
).map("".join)


def plain(body: str) -> Fragment:
    return Fragment(("'" + body.replace("'", "''") + "'",), body)


def unicode_escaped(body: str) -> Fragment:
    return Fragment(("U&'" + body.replace("'", "''").replace("\\", "\\\\") + "'",), body)


def dollar_quoted(body: str) -> Fragment:
    quotes = (quote for quote in ("$$", "$q$", "$é1$") if (body + quote).index(quote) == len(body))
    quote = next(quotes)
    return Fragment((quote + body + quote,), body)


def named(body: str) -> Fragment:
    name = '"' + body.replace('"', '""') + 'n"'
    return Fragment((f"(SELECT {name} FROM (SELECT 5 AS {name}) AS {name})",), 5)


@st.composite
def escaped(draw: st.DrawFn) -> Fragment:
    """Return an E'' string of one or more parts, with doubled or escaped quotes."""
    bodies = draw(st.lists(BODIES, min_size=1, max_size=3))
    quote = draw(st.sampled_from(["''", "\\'"]))
    between = draw(st.sampled_from(["'\n'", "' \t\r\n '", "' -- it's :key\n'", "'\n-- \"\n  --\n'"]))
    parts = (body.replace("\\", "\\\\").replace("'", quote) for body in bodies)
    return Fragment(("E'" + between.join(parts) + "'",), "".join(bodies))


@st.composite
def blanks(draw: st.DrawFn) -> str:
    """Return whitespace and comments, also nested ones."""
    body = draw(BODIES)
    line, block = body.replace("\n", " "), body.replace("/", "")
    return draw(st.sampled_from(["", " ", "\r\n\t", f"--{line}\n", f"/*{block}*/", f"/*/* {block}*/ :key {block} **/"]))


FRAGMENTS = st.one_of(
    BODIES.map(plain),
    BODIES.map(unicode_escaped),
    BODIES.map(dollar_quoted),
    BODIES.map(named),
    escaped(),
    st.sampled_from(
        [
            Fragment(("'5'::int",), 5),
            Fragment(("B'10'::text::int",), 10),
            Fragment(("X'1F'::int",), 31),
            Fragment(("make_interval(secs:=5)::text",), "00:00:05"),
            Fragment(("('{1,2,3}'::int[])[1:2]",), [1, 2]),
            Fragment(("(SELECT a$b$ FROM (SELECT 5 AS a$b$) AS a$)",), 5),
            Fragment((":key",), "42"),
            Fragment((":key", "::int"), 42),
            Fragment(("-", ":eventVersion", "::int"), -7),
            Fragment((":payload", "->>'name'"), "Ann"),
            Fragment((":key", "||", ":tenantId", "||':key'"), "42acme:key"),
            Fragment(("(", ":payload", "-'tags'-'at')::text"), '{"name": "Ann"}'),
        ]
    ),
)


@st.composite
def statements(draw: st.DrawFn) -> tuple[list[str], list[object]]:
    """Return the pieces of a SELECT, and the row that it must return."""
    fragments = [*draw(st.lists(FRAGMENTS, max_size=5)), Fragment((":tenantId",), "acme")]
    fragments = draw(st.permutations(fragments))
    pieces = ["SELECT "]
    for number, fragment in enumerate(fragments):
        pieces += [draw(blanks()), *fragment.pieces, draw(blanks())]
        pieces.append("," if number < len(fragments) - 1 else draw(st.sampled_from([" ", ";", "; -- :key"])))
    return pieces, [fragment.value for fragment in fragments]


def check_parameters(pieces: list[str]) -> SqlTemplate:
    """Return the template of *pieces*, which must have exactly their parameters."""
    template = parse("".join(pieces))
    used = [piece[1:] for piece in pieces if piece[1:] in TYPES]
    assert template.names == tuple(dict.fromkeys(used))
    numbers = {name: number for number, name in enumerate(template.names, 1)}
    bound = [f"(${numbers[p[1:]]}::{TYPES[p[1:]]})" if p[1:] in TYPES else p for p in pieces[:-1]]
    assert template.sql.startswith("".join(bound).strip(" \t\r\n"))
    return template


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(300, soak=10_000))
@given(statements())
def test_exactly_the_parameters_are_found(statement: tuple[list[str], list[object]]) -> None:
    """R3: between any strings, comments, identifiers and casts, exactly the parameters are replaced."""
    check_parameters(statement[0])


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(
    max_examples=examples(60, soak=3_000),
    suppress_health_check=[
        HealthCheck.function_scoped_fixture
    ],  # statements only read, so all examples share one database
)
@given(statement=statements())
async def test_postgresql_parses_the_same_way(db: Database, statement: tuple[list[str], list[object]]) -> None:
    """R3: strings, comments and parameters are the same for the template and for PostgreSQL."""
    pieces, values = statement
    assert await run(db, check_parameters(pieces)) == tuple(values)
