"""One run: select files, process, judge, publish, recover."""
