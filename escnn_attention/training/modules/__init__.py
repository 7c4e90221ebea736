"""Lightning modules: what is learned, by what loss, and how it is measured."""
