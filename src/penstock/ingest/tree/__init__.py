"""The storage of the files of ingest: a folder or a bucket."""
