"""`poise key`: the group of verbs about API keys. A verb <verb> lives in poise.cli.key_<verb>."""

from __future__ import annotations

from poise.cli.module_group import ModuleGroup

command = ModuleGroup("key", help="API keys of tenants.")
