"""Harvest: paged APIs, synchronised by partitions.

In the order of the data: service (request), sources and feed (pages, records), plan (count, partition), fetch (raw
records), consolidate (canonical records, watermark). alerts reports failures, api serves operators, simulator is a
source for tests and demos.
"""
