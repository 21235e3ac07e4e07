"""`penstock doctor`."""

import asyncio
import sys

from penstock.cli.output import ConfigOption, DataDirOption, JsonOption, emit, table


def doctor(config: ConfigOption = None, data_dir: DataDirOption = None, json: JsonOption = False) -> None:
    """Find out what would keep Penstock from running here, and say what to do about it."""
    from penstock.app.doctor import diagnose
    from penstock.settings import load_settings

    findings = asyncio.run(diagnose(load_settings(config, overrides={"data_dir": data_dir})))
    data = [finding.as_dict() for finding in findings]
    rows = [["ok" if f.error is None else "FAIL", f.name, f.detail] for f in findings]
    hints = [f"{f.name}: {f.error.hint}" for f in findings if f.error is not None and f.error.hint]
    emit(data, as_json=json, text="\n".join([table(rows), *hints]))
    sys.exit(max((finding.error.exit_code for finding in findings if finding.error), default=0))
