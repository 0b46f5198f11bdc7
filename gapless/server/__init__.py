"""The HTTP server: OpenAI's API over an engine process."""
