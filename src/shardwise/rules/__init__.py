"""Pure: what each operator allows on ONE mesh axis, in one notation and one registry."""
