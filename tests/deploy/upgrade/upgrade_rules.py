"""What a migration may do while the release before it is still at work: it may only add."""

import re
from collections.abc import Iterable, Iterator

CONTRACT = re.compile(r"-- contract: since \d+\.\d+\.\d+\b")
_LOCKS = re.compile(r"^-- locks: (.+)$", re.MULTILINE)
_TOKENS = re.compile(
    r"""--[^\n]*|/\*.*?\*/            # comments
    |(?P<tag>\$(?:[A-Za-z_]\w*)?\$).*?(?P=tag)   # the body of a function
    |'(?:[^']|'')*'                # strings""",
    re.DOTALL | re.VERBOSE,
)
_TABLE = re.compile(r"\bcreate\s+(?:unlogged\s+)?table\s+(?:if\s+not\s+exists\s+)?([\w.\"]+)", re.IGNORECASE)
_INDEXED = re.compile(
    r"^create\s+(?:unique\s+)?index\s+(?:concurrently\s+)?(?:if\s+not\s+exists\s+)?(?:[\w\"]+\s+)?on\s+(?:only\s+)?([\w.\"]+)"
)
_ALTERED = re.compile(r"^alter\s+table\s+(?:if\s+exists\s+)?(?:only\s+)?([\w.\"]+)\s+(.*)")
# How a statement begins, and why it cannot be while another release works on the same tables.
_STATEMENTS = {
    r"drop\s+(table|view|materialized|function|procedure|type|domain|sequence|schema|trigger|index)": "drops",
    r"alter\s+\w+(\s+\w+)*?\s+[\w.\"]+\s+rename\b|alter\s+table\s.*\brename\b": "renames",
    r"truncate\b": "empties a table",
    r"alter\s+type\b": "changes a type",
    r"create\s+or\s+replace\s+(function|view|procedure)": "replaces what the release before uses",
    r"(update|delete)\b": "rewrites rows in one transaction",
    r"do\b": "does what cannot be read here",
    r"create\s+(unique\s+)?index\s+concurrently": "cannot run: a migration is one transaction",
    r"(vacuum|cluster|reindex)\b": "locks a whole table",
    r"lock\b": "locks a whole table",
}
# What an ALTER TABLE does to a table that was there before.
_ACTIONS = {
    r"drop\s+(?!default|not\s+null|expression|identity)": "drops",
    r"rename\b": "renames",
    r"alter\s+(column\s+)?[\w\"]+\s+(set\s+data\s+)?type\b": "changes a type: the table is rewritten",
    r"alter\s+(column\s+)?[\w\"]+\s+set\s+not\s+null": "asks of the release before what it does not know",
    r"add\s+(constraint\s+[\w\"]+\s+)?(primary|unique|exclude|check|foreign)(?!.*\bnot\s+valid)": "checks every row",
    r"add\s+constraint\s+[\w\"]+\s+not\s+null(?!.*\bnot\s+valid)": "checks every row",
    r"set\s+(logged|unlogged|tablespace|access\s+method)": "rewrites the table",
}
_ADDED = re.compile(
    r"^add\s+(?:column\s+)?(?:if\s+not\s+exists\s+)?(?!constraint\b|primary\b|unique\b|check\b|foreign\b|exclude\b)"
)
_VOLATILE = re.compile(r"\bdefault\s+[^,]*\b(random|clock_timestamp|gen_random_uuid|nextval|uuidv7|timeofday)\b")


def tables_made(sql: str) -> list[str]:
    """The tables a migration makes."""
    return _TABLE.findall(_plain(sql))


def broken_rules(sql: str) -> list[str]:
    """Why a migration cannot be applied beside the release before; nothing for one that says it is a contraction."""
    if CONTRACT.match(sql):
        return []
    made = {name.lower() for name in tables_made(sql)}
    found = [f"{why}: {statement}" for statement in _statements(sql) for why in _faults(statement, made)]
    declared = {name.strip() for line in _LOCKS.findall(sql) for name in line.split(",")}
    return found + [
        f"writes to {name} are blocked: declare `-- locks: {name}`" for name in _indexed(sql) - made - declared
    ]


def _statements(sql: str) -> list[str]:
    return [" ".join(statement.lower().split()) for statement in _plain(sql).split(";") if statement.strip()]


def _plain(sql: str) -> str:
    """Without comments, strings and bodies of functions: what is left holds no word that is not SQL's."""
    return _TOKENS.sub(lambda found: " " if found[0].startswith(("--", "/*")) else "''", sql)


def _faults(statement: str, made: Iterable[str]) -> Iterator[str]:
    for begins, why in _STATEMENTS.items():
        if re.match(begins, statement):
            yield why
    altered = _ALTERED.match(statement)
    if altered and altered[1] not in made:
        for action in _actions(altered[2]):
            yield from _faults_of_action(action)


def _faults_of_action(action: str) -> Iterator[str]:
    for does, why in _ACTIONS.items():
        if re.match(does, action):
            yield why
    if _ADDED.match(action):
        if "not null" in action and "default" not in action:
            yield "asks of the release before what it does not know"
        if re.search(r"\b(unique|primary key|references|check)\b|\bgenerated\b", action) or _VOLATILE.search(action):
            yield "checks or writes every row"


def _actions(text: str) -> list[str]:
    """The actions of an ALTER TABLE: at commas that are in no brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [statement.strip() for statement in found]


def _indexed(sql: str) -> set[str]:
    return {match[1] for statement in _statements(sql) if (match := _INDEXED.match(statement))}
