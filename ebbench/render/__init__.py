"""Results for readers: pure functions from summaries to rich renderables and sentences."""
