"""The window: a web page of this machine that shows checkpoints, runs and timelines (`waystation view`).

`server` answers the page: it lets in nobody who lacks the token, and changes nothing. `statistics` looks at
the values of arrays, `timelines` reads files of events. What a command has a JSON document for is shown from
that document, which `server.Documents` asks of the command line. `assets` is the page itself: HTML, CSS and
JavaScript that fetch nothing from anywhere else. Needs the packages of the extra `view`.
"""
