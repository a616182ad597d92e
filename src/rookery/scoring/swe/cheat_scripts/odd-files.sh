# leaves FIFOs, sockets, a sparse terabyte file, very long names and unreadable directories
quiet mkfifo pipe; quiet truncate -s 100M hole; mkdir -p locked/in && quiet chmod 000 locked
quiet touch "$(printf 'new\nline')" '$(touch owned)' '`id`' -- '-rf' "quo'te\"s" "$(printf '\377\376')"
d=deep; for i in 1 2 3 4 5 6 7 8 9; do d=$d/deep; done; mkdir -p $d; quiet python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
