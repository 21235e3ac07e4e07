"""Files to tables: formats, archives, workbooks."""
