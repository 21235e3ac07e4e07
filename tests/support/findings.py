"""What a report finds, for tests."""

from penstock.kernel.status import PartReport


def found(report: PartReport) -> list[tuple[str, str, str]]:
    return [(finding.severity.value, finding.subject, finding.what) for finding in report.findings]
