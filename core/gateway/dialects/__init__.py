"""How models write thoughts and tool calls: reading their text as it comes, and grammars that hold them to a form."""
