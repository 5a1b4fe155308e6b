"""Generations as HTTP answers: run for as long as the client is there, worded as each endpoint words them."""
