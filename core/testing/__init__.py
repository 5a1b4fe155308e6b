"""The kit for plugin authors' tests: tiny real checkpoints and a hub on the loopback interface."""
