"""Where each (file, shard) stands, stage by stage: for daemons in any language."""
