"""The tray app: a face over core.node for a friend who has no terminal open. Headless, the same without an icon."""
