"""The command line: one file per verb. A leaf: nothing imports it, and it imports heavy rooms only when a verb runs."""
