"""The seams: one abstract class per kind of plugin, and the plain data that crosses it."""
