"""Watch: the measures of an audit, live, in somebody else's training loop."""
