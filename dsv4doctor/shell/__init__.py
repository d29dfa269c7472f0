"""Reading shell scripts without running them: syntax -> expansion -> commands.

Why our own reader and not a library: a launch script needs words with their quoting kept (so
that `$ARGS`, `"${ARGS[@]}"` and `'$ARGS'` differ), and input of any kind must end in a result
or one error, in bounded time.  `shlex` drops the quoting.  `bashlex` is GPL and dormant.
`tree-sitter-bash` (MIT) parses real scripts well, but took over 25 s on 1 MiB of `A=(A=(...` or
`<<<<...` and 1.6 s on 20 kB of random punctuation, and its tree would still need all of the
expansion below.  The scanner here passes over the text once.
"""
