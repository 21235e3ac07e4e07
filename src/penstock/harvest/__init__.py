"""Harvest: paged APIs, synchronised by partition.

Packages in the order of the data: service (request a run), sources and feed (pages, records), plan (count, partitions),
fetch (raw records), consolidate (canonical records, watermark). Besides them, alerts reports failures, api serves
operators, and simulator is a source for tests and demos.
"""
