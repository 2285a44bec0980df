"""Budgets before a machine is bought: arithmetic on shapes and data sheets, no server, no model loaded."""
