"""The HTTP side: an OpenAI-compatible API, cluster status and health, over an engine that it is given."""
