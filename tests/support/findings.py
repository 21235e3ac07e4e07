"""What a report finds, for tests."""

from penstock.kernel.findings import PartReport


def found(report: PartReport) -> list[tuple[str, str, str]]:
    return [(one.severity.value, one.subject, one.what) for one in report.findings]
