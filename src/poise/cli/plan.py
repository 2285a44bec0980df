"""`poise plan`: the group of budgeting verbs; a verb <verb> lives in poise.cli.plan_<verb>."""

from __future__ import annotations

from poise.cli.module_group import ModuleGroup

command = ModuleGroup(
    "plan", help="Budgets: memory, roofline, batching, speculation. No server, no model loaded."
)
