"""How a coordinator is found on a local network: by multicast DNS, with nothing secret in it."""
