"""Drop-in parts for other frameworks; each module imports its framework only when used."""
