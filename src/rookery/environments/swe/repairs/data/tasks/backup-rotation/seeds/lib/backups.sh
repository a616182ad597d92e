# The backups of a folder, the newest first, one a line.
backups() {
    ls -tA $1 | grep '\.bak$'
}
