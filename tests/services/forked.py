"""Processes forked from one that has loaded everything and used nothing: as good as new ones, and quick."""

import multiprocessing

# Python keeps one such process for all who fork in ours, and has it load what it was told last before the first of them
# came. Whoever named only its own would have the others load theirs anew, with every process they start.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "penstock.serving",
        "penstock.worker_programs",
        "tests.flows.worker_child",
        "tests.harvest.crashing",
        "tests.ingest.crashing",
        "tests.kernel.crashing_worker",
        "tests.refdata.crashing",
        "tests.tracking.claimer",
    ]
)
