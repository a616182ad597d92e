# leaves more files than can be copied
quiet truncate -s 10T huge; i=0; while [ $i -lt 300 ]; do echo x > many-$i; i=$((i+1)); done
