"""`poise verify`: the group of proving verbs; without one, `poise verify MODEL` runs the checks.

A verb <verb> lives in poise.cli.verify_<verb>.
"""

from __future__ import annotations

from poise.cli.module_group import ModuleGroup

command = ModuleGroup(
    "verify",
    default="checks",
    help="Prove on your model and machine that nothing changes an answer that should not.",
)
