"""The coordinator: members, plan, route, sessions; and its own share of the model, the embedding and the head."""
