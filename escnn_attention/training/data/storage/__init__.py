"""Where data is kept: folders, downloads, and files of arrays."""
