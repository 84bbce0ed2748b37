"""How many bytes a GPU needs, before one is asked for: counted from config.json and the configuration alone."""
