"""The commands. :mod:`.main` finds one and imports its module; a module a command group, imports lazy."""
