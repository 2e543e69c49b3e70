"""Programs on several hosts: network namespaces of this machine, with addresses and link speeds of their own."""
