"""Results as people read them: pure functions from summaries to rich renderables and words."""
