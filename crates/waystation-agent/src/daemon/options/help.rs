//! What `waystation-agent --help` says.

/// What the program is for, and what it takes.
pub const HELP: &str = "\
Keeps versions of a program's state in this host's memory, beyond the deaths of the program and its own.

usage: waystation-agent run --directory DIRECTORY --run-id ID --slots N --data-bytes BYTES
                            --memory-cap-bytes BYTES [OPTION...]
       waystation-agent discard --directory DIRECTORY [--allow-disk]

run: serves the processes of this host until SIGTERM, which leaves every slot as it is. Prints one line of JSON
once it is ready, and what happens on stderr. Takes over what an earlier agent has left in the directory.
  --directory DIRECTORY     a directory on tmpfs, of this user alone (0700); made if its parent is there
  --run-id ID               the run whose versions it keeps, 32 hex digits
  --topology ID             what the slots were counted for, 32 hex digits; by default zeros
  --slots N                 how many slots: one more than --versions for every shard that is kept here
  --data-bytes BYTES        how many bytes of arrays a slot holds
  --contents-bytes BYTES    how long a table of contents may be; by default 1MiB
  --slot-bytes BYTES        instead of both: how long the file of a slot is
  --versions N              committed versions of each shard that are kept, while the next one is written; at least 1,
                            by default 2
  --memory-cap-bytes BYTES  what the store may take of the host's memory; more is refused, never taken
  --threads N               threads that verify slots; by default 4, or as many as there are cores
  --metrics HOST:PORT       serves numbers for Prometheus there, at /metrics, to anybody who asks
  --allow-disk              the directory may be on a disk

With the first four of these the agent is one of several, which together keep copies of what the trainers of all
their hosts save; all have the same --run-id, --hosts and --copies:
  --listen HOST:PORT        where it listens for the others
  --host NAME               the name of this host
  --hosts FILE              all hosts: a JSON list of objects of name, address (host and port) and domain;
                            hosts that may fail together have one domain, by default each its own. Read again when
                            it has changed: a host may be replaced at another address
  --secret-file FILE        what only they know, at least 16 bytes; readable by this user alone
  --tls-certificate FILE    has the agents show each other certificates, and encrypts all that they say: that of this
                            host, by the name that --host gives, for servers and clients; PEM
  --tls-key FILE            its key; readable by this user alone
  --tls-authorities FILE    who has signed the certificates of all hosts
  --copies N                how many copies of each shard there are to be; by default 2
  --link-bytes-per-s BYTES  what the link to the others carries; by default it is used as it comes
  --link-share SHARE        which share of that copies may take, up to 1; by default 1
  --dead-after-s SECONDS    an agent that is silent for so long is taken for dead; by default 3
  --give-up-s SECONDS       a version that lacks copies after so long is given up; by default 60

discard: removes what is kept in the directory. Refused while an agent or a process uses it.

BYTES are a number, or one with KiB, MiB, GiB or TiB.
";
