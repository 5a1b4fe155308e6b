"""Who may join: a machine's identity, invites, the register of members, and the proof of who one is. No network."""
