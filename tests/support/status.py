"""The issues of a part, as tests compare them."""

from penstock.kernel.status import PartReport


def issue_tuples(report: PartReport) -> list[tuple[str, str, str]]:
    """Return severity, subject and problem of every issue of *report*."""
    return [(issue.severity.value, issue.subject, issue.problem) for issue in report.issues]
