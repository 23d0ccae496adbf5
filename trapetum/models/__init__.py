"""What a checkpoint means: config -> architecture, tensor roles, per-architecture rules."""
