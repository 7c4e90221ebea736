"""The experiments of attentive group convolutions."""
