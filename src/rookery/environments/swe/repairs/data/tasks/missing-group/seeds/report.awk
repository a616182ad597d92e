# One line for each group of lines with the same first field, and one for all.
BEGIN { FS = OFS = "\t" }

NR > 1 && $1 != region {
    print region, count, sum
    count = sum = 0
}

{
    region = $1
    count++
    sum += $3
    all++
    total += $3
}

END { print "total", all, total }
