//@ name geometry_widest_pair
//@ size 3000
//@ types
struct Point {
    double x, y;
};
//@ prompt
/* Return the largest distance between any two of the points, or 0 for fewer than two points.
{model}   Example:

   input: [{0, 0}, {3, 4}, {1, 1}]
   output: 5
*/
double widestPair(std::vector<Point> const& points) {
//@ serial
    double most = 0.0;
    for (size_t i = 0; i < points.size(); i += 1) {
        for (size_t j = i + 1; j < points.size(); j += 1) {
            const double dx = points[i].x - points[j].x, dy = points[i].y - points[j].y;
            most = std::max(most, dx * dx + dy * dy);
        }
    }
    return std::sqrt(most);
}
//@ omp
    double most = 0.0;
    #pragma omp parallel for reduction(max : most) schedule(dynamic, 64)
    for (size_t i = 0; i < points.size(); i += 1) {
        for (size_t j = 0; j < i; j += 1) {
            const double dx = points[i].x - points[j].x, dy = points[i].y - points[j].y;
            const double square = dx * dx + dy * dy;
            if (square > most) most = square;
        }
    }
    return std::sqrt(most);
}
//@ driver
struct Case {
    std::vector<Point> points;
    double widest;
};

Case draw(size_t size, Random &random) {
    Case made{{}, -1.0};
    for (size_t i = 0; i < size; i += 1) made.points.push_back({uniform(random, -9, 9), uniform(random, -9, 9)});
    return made;
}

void sample(Case &c) { c.widest = widestPair(c.points); }
void best(Case &c) { c.widest = reference::widestPair(c.points); }
bool same(Case const &got, Case const &wanted) { return near(got.widest, wanted.widest); }
