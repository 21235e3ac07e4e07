"""The terminal side of the command line: parsing, help, output and colours, the same for every command."""
