"""Four daemons that take event files through the stages of the pipeline API and into MySQL, exactly once."""
