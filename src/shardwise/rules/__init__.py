"""The layouts that each operator allows on one mesh axis, in one notation and one registry."""
