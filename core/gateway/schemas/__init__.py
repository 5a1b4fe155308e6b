"""The API's bodies: what a request may say, and what an answer says."""
