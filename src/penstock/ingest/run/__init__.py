"""The run of a supplier: select a file, process it, check its quality, publish it, and recover killed runs."""
