"""The base classes of recipes, by what is done with a text: retrieved with it, or graded it by
itself."""
